"""JSON schemas with keywords that llguidance lacks, rewritten into schemas without them."""
