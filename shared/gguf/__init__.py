"""Models in one `.gguf` file, as llama.cpp and its relatives publish them."""
