"""`axl bench retrieval`: an index for many tenants beside filtered search and an index for each tenant."""
