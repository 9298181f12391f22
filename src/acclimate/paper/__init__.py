"""The paper, table by table: recipes that measure it again at any scale, and the paper's own numbers.

recipe, scale = RECIPES["ablation"], SCALES["digits"]
for file in reproduce(recipe, scale, Path("paper")):
    print(file)
"""
