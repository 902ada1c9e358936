"""Write a program as the text that runs, one file per pipeline rank, and read an edited text back."""
