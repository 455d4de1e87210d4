"""What decoding costs on a GPU, predicted from structures and the GPU's ceilings; nothing is run."""
