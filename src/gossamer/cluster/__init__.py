"""The real world: workers are processes, and gRPC with mutual TLS carries what they say."""

import os

# What gRPC's core writes to stderr on every refused handshake would let strangers fill a terminal;
# what matters is in the typed errors. It must be set before grpc is imported; a user's own choice
# counts.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
