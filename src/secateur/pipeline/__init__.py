"""The jobs that users ask for, each made of the rooms below: cut, compress, sweep."""
