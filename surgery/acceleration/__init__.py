"""Triton kernels for loaded models: `accelerate(model)` switches attention to them, `decelerate(model)` undoes it."""

from surgery.acceleration.accelerate import Acceleration, accelerate, decelerate

__all__ = ["Acceleration", "accelerate", "decelerate"]
