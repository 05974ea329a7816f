"""The benchmark: what speculation brings on this machine, measured against plain decoding of the same bundle."""
