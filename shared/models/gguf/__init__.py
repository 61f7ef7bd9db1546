"""Models in the GGUF format of llama.cpp."""
