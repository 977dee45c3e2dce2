"""Verifiers for rows with a reference answer, each a config: mathematics, text, JSON, code, an LLM's judgement.

`rl.verification.service.Verifier` runs them in processes with a deadline. Each has a version and a self-test
(`self_test`): wrong answers made from right ones must score 0, right ones in other words 1.
"""
