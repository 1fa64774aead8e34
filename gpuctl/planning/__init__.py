"""What a phase will need and hold, said before anything is deployed.

`known` gathers and remembers what machines tell, `servers` plans each server and its cells from it (pure), `telling`
puts it into words and pictures (pure).
"""
