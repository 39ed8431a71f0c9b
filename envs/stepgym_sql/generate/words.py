"""Words that names of people, places and things are made of."""

from __future__ import annotations

FIRST = "Ada Ben Cleo Dana Emil Fay Gus Hana Igor Jade Kira Leon Mona Nils Olga Petr Rosa Sven Tara Uwe Vera Yuri Zoe"
LAST = "Abel Boyd Cruz Dahl Egan Fink Gray Hale Imai Jung Koch Lund Mehta Novak Okoro Park Quinn Rossi Sato Tran Weiss"
TITLE_A = "Silent Golden Distant Broken Hidden Early Velvet Northern Paper Crystal Wild Amber Hollow Bright Frozen Last"
TITLE_B = (
    "River Harbor Garden Mirror Season Letter Mountain Engine Voyage Island Winter Lantern Bridge Forest Signal Road"
)
CITIES = "Oslo Lima Porto Cairo Delhi Quito Turin Lagos Kyoto Leeds"
COUNTRIES = "Norway Peru Egypt India Italy Japan Kenya Chile"
PRODUCTS = (
    "Velor Brisk Nimbo Tarka Oxana Pluma Quista Rovex Sorel Tindra Umbra Vanto Wexel Xandu Yaro Zephy Corda Delmo"
)
MAKERS = "Arvo Belka Cenex Dorin Evora Falko Gerro Havel Intra Jovis Kelda Lumex Marno Norvo Orsel Parva"
