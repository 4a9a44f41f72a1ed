"""The files of a checkpoint: manifest, safetensors, checksums, and the strict readers and writers of them."""
