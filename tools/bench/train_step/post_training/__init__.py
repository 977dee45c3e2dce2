"""`axl bench sft_step` and `axl bench dpo_step`: one supervised or preference step beside TRL's."""
