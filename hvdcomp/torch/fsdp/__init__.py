"""The bindings of FSDP2. One compresses between the replicas of a model, and the other compresses the reduce-scatter of
its shards."""
