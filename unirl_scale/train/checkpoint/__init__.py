"""Snapshots in memory, checkpoints on disk, and the way back from either.

entries    what a rank holds, without its layout; who writes what and who reads what
checksum   one word of evidence a chunk of bytes
shard      a safetensors file: its header, its chunks and their checksums
manifest   what a save consists of; sealed JSON
reading    byte ranges of a save -> tensors of any layout, verified
store      the directory of checkpoints: names, `latest`, retention, incarnations
writer     the thread that makes a snapshot durable
snapshot   buffers that outlive the trainer, and their copies on other nodes
saving     what the training loop talks to
resume     which save to continue from, and whether it belongs to this run
"""
