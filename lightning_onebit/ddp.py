"""The optimizers under DistributedDataParallel: for a model that somebody else has wrapped."""

from lightning_onebit.strategy.ddp import clip_grad_norm_, load_residuals, onebit_ddp, save_residuals

__all__ = ["clip_grad_norm_", "load_residuals", "onebit_ddp", "save_residuals"]
