"""What adapts the optimizers to Lightning, Fabric and DistributedDataParallel."""
