"""Tool calls: how models write them, the prompts that offer tools, and the grammars that constrain them."""
