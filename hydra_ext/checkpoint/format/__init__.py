"""The files of a checkpoint: manifest, safetensors and checksums, with strict readers and writers."""
