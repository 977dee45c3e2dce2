"""Agents of others: programs that speak OpenAI's protocol, whose requests the policy answers as turns of an episode."""
