"""The bindings of FSDP2, between the replicas of a model and in the reduce-scatter of its shards."""
