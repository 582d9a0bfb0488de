"""The object store: what serves it (`seaweedfs`) and the proof that it works (`probe`)."""
