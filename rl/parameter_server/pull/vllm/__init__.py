"""A vLLM server that follows the parameter server: `mirror` sends it versions, `receiver` loads them in its process."""
