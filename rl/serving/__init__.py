"""An endpoint that speaks the HTTP protocol of OpenAI's completions, in front of the rollout engine."""
