// Sets the chosen theme before the first paint; without a choice the system decides.
{
  const theme = localStorage.getItem("pagewire.theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
}
