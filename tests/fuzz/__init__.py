"""Made-up input for every part that reads what others send: `python -m tests.fuzz`. Nothing may crash, hang, leak or lie."""
