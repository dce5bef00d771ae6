"""What lies flat on the host beside a model's parameters: views of parameters, sections of host memory cut
into buckets, a ring of slots on the device, and the thread that moves buckets."""
