"""Mixture of experts: layer, routers, experts, and the exchange of rows between devices."""
