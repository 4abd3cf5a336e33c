"""The two bindings of FSDP2. The first binding compresses the exchange between the replicas of a model. The second
binding compresses the reduce-scatter of the shards of a model."""
