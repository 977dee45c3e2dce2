"""`axl bench grpo_step`: one GRPO update beside peers."""
