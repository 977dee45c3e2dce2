"""`axl aot`: an experiment's steps, compiled for TPUs that are not there."""
