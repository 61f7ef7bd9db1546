"""The weights of models in the GGUF format of llama.cpp."""
