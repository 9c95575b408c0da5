"""Model execution. torch is imported only below this folder (and in functions/)."""
