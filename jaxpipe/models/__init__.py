"""What is computed: pieces, layers and model families."""
