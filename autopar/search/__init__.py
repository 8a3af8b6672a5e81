"""The best plan: cost graphs, and exact ways to find the least of them."""
