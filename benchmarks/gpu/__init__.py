"""What one GPU does with this engine: sections in processes of their own, behind `python -m benchmarks gpu`.

Needs llama_core, torch, Triton, NumPy and pytest only. `program` runs the sections, `child` is a section's process, `recorder`
keeps its figures, `page` writes them down.
"""
