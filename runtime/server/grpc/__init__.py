"""The gRPC server, beside HTTP in the front process. `make proto` makes pagec_v1_pb2.py from the .proto."""
