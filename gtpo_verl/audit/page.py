from pathlib import Path
def write_page(store, plan, result, facts):
    return Path("none")
