"""Storage and serving of shards, in memory and offloaded."""
