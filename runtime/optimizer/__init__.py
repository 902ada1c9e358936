"""Sum, scale, clip and shard gradients, and step the optimizer on one replica's share (ZeRO-1)."""
