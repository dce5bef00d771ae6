"""The sources' spellings, as adapters over the engine. Nothing of the engine imports them."""
