"""Checks: one file a cause, found by looking into this folder; the file's name is the cause's id.

A check has
  a docstring: its first line is the title, the rest says why it happens (`gpuctl doctor --explain ID`);
  LAYER, where in the boot order the cause lies;
  check(box) -> Iterator[Finding]: pure, reads facts, yields what is wrong and nothing when nothing is.

What a fact cannot tell is `Unknown`: a check lets it pass when without it nothing can be said, and the doctor shows
that the check could not be made; it catches it (`snapshot.get`) when the rest is enough to say "likely".
PROVED is said only when all the evidence the cause requires was seen; what speaks against goes into `against`;
`separates` names the observation that would settle a case. A check imports no other check.
"""
