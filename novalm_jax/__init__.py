"""NovaLM-JAX."""
