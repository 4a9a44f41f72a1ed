"""One model over many ranks: stages, versions of weights, schedules run over torch.distributed."""
