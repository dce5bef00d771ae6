"""Names of other projects, as adapters over the engine: of Megatron-core (requirements S2), of an engine for
torchtitan (S3) and of the watermark runtime (S0). Nothing of the engine imports them."""
