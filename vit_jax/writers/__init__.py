"""Where the numbers of a run go besides its folder: one module for each service.

A module has a class `Writer`, made of a `base.Run` on process 0 alone, with the methods

    scalars(step, values)    takes {name: number} of a step; one may come in several calls
    close()                  is called once, also after a failure

and, where it can, with those that get what `config.every.examples` asks for

    image(step, name, pixels)    takes a picture, uint8 [Y X 3]
    texts(step, name, rows)      takes rows of {column: text}

An `OSError` ends the run in order, as a full disk does. After any other exception the run goes on
without the writer, for its folder holds the same numbers.
"""
