"""What checkpoints and safetensors share: leaves, read requests, files."""
