"""Updates in parts: frozen parameters held apart, minibatches, and programs that run for several trainers."""
