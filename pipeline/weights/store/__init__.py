"""The weight channel through files: the same objects, in a directory or an object store that both ends reach.

In: weight states on one machine. Out: the same states on others, every byte verified, without a
connection between them. docs/protocol.md, "Through files", says what lies where.
"""
