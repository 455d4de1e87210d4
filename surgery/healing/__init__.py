"""Recovery training of converted checkpoints: orchestration around `surgery.training`."""
