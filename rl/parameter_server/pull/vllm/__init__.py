"""A vLLM server that follows the parameter server: `mirror` sends versions, the plugin `axl_weights` loads them."""
