"""Model families: configs of shared layers, no code of their own."""
