"""`axl bench learning`: what each objective learns from one supervised start."""
