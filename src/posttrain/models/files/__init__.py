"""The files of a model: a folder, a GGUF file, the hub; whether they are whole and will fit."""
